"""Models and devices that are not here, from one table of constants, and where they fit."""
