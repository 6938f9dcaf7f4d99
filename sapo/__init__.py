"""SAPO: Search Agent Policy Optimization (arXiv 2603.10069). Not Soft Adaptive Policy Optimization (arXiv 2511.20347)."""
