"""Decoding with EAGLE-3 (design §7): chains of drafts, each verified by one forward of the target, on one device."""
