"""Files and folders of ours: written whole, read with distrust."""
