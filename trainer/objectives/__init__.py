"""Objectives: named loss sums over named weights."""
