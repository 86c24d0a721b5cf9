"""A run on one page of HTML: self-contained, without scripts, in light and dark, on a phone and
on paper.
"""
