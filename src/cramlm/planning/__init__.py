"""Measure the machine; from a budget to sizes and steps; forecast the cost."""
