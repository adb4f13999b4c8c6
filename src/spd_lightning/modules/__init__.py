"""The mathematics of the target and the drafters. Knows no ranks and no loops over tokens."""
