"""What is read from the environment of this process and set in it: the only folder that touches os.environ."""
