"""Attention over replicated rows under the structural mask (design §4): a dense twin and exact fast backends."""
