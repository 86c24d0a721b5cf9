"""Where a training's time went: in sentences, with who was waited for and what would help; and on
one page of HTML, self-contained, without scripts, in light and dark, on a phone and on paper.
"""
