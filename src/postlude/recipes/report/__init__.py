"""`report.html`: what a run's page shows, and how. Open `page.py` first."""
