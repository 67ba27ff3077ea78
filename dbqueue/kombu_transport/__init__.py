"""The Kombu transport: a Celery app whose broker is ``dbqueue+postgresql://...`` or ``dbqueue+sqlite:///...``.

A message is a job row: publish is enqueue, deliver is claim, ack ends it as ``acked``, reject as dead, requeue puts it back in its
place. ``station`` does the work of a process on a thread of its own; ``channel`` translates kombu's calls; ``transport`` is what
kombu and Celery's event loop hold.
"""
