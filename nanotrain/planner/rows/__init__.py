"""`nanotrain plan --rows`: predictions for tables of measurements of other people's runs.

table      read a table, predict its rows and write the predictions
config     a row as a scenario
settings   settings and options that the words of a row mean
model      the model section of a row
row        cells of a row as text, numbers and words

Data: words.yaml, patterns of words and their meaning; models.yaml, sizes that tables leave out of
published architectures.
"""
