"""Tuning where modules run: schedules are timed on a user's own GPU, and the fastest are kept.

    candidates (`schedules.candidates`) ─> tuner ─> tuned ─> folder ─> found ─> the choice

`tuner` compiles candidates, checks them against the f64 reference and times them. `tuned` is what
it found about one norm on one kind of GPU, `folder` keeps that for the user, and `found` looks it
up where modules are compiled. Only this last step reads the folder; `schedules.choose` does not.
"""
