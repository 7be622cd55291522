"""What a routing rule costs in quality: a tiny language model, its texts, training runs and adaptations, and what stored rows say over seeds."""
