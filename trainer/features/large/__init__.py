"""Estimate a run on many ranks on paper: `train plan ranks=4096 network=400Gbps`. Read `costs`."""
