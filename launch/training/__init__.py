"""The training loop of every run, whatever it trains: schedules, goals, speed, inspection."""
