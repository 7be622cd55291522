"""The texts that models are trained on, and which of their bytes a step sees."""
