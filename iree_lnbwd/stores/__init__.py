"""Where modules and tuned schedules are kept for a user."""
