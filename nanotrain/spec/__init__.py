"""The model as data: boxes of tensors, parameter declarations, sizes, pipeline stages, counts; without torch."""
