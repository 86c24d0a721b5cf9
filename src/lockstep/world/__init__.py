"""The ranks that train together: init, World, groups, rendezvous."""
