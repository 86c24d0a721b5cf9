"""Gradients in fewer bits: cast, quantised, factored, or only the largest of them; and what each leaves out, paid later."""
