"""What a model reaches on its validation text, and what its routers do there."""
