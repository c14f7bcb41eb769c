"""Run a plan with torch: a place kept for a later change. Nothing here runs anything yet.

`planner` never imports this package, and a host that only plans needs no torch.
"""
