"""The paper, one room per section: backbone, label set, region set, matching, losses, RAM."""
