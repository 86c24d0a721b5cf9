"""Starting, watching and stopping ranks."""
