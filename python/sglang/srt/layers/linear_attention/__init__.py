"""Linear attention with the gated delta rule: layers whose state does not grow with the context."""
