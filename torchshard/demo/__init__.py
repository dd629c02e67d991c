"""The main job from end to end on real text: `torchshard demo`. ranks.py is the script that every rank runs."""
