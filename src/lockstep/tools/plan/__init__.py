"""What a training will cost before anybody runs it: bytes and time from formulas, beside what
was measured.
"""
