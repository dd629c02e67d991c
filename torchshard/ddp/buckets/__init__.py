"""What a bucket is: its memory, of each kind; which gradients it holds, and how it is reduced."""
