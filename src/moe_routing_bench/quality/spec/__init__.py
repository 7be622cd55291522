"""What a training run or an adaptation depends on, what its rows hold, and how a config becomes both. Without torch."""
