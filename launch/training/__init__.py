"""The training loop of every run, whatever it trains: schedules, the best checkpoint, the end, speed, inspection."""
