"""``--odyssey-device cpu``: what stands in for a GPU and its kernels. ``device`` redirects calls, ``preload`` is for
``odyssey run --preload``.
"""
