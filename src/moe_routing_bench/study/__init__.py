"""What the workflow and the commands share: the request of a user, and how much of it is done."""
