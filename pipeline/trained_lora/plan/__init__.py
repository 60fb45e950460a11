"""The training plan: a pure function of samples and settings, computed before anything is launched.

    inputs.py          the columns that the plan uses: bucket, dataset, repeats, captions, views
    mixing.py          which inputs an epoch draws, and how datasets are mixed
    batching.py        which draws share a micro-batch, and when its turn is
    steps.py           which micro-batches form a step; rank, caption, view and dropout of each slot
    random_streams.py  the random numbers of all of these, and of noise and initial adapter weights

Interrupted runs resume by index into the plan, so its order must never change.
"""
