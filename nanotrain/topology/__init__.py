"""Pure plans: which ranks form a group, which box of a tensor a rank owns, which layers a stage holds."""
