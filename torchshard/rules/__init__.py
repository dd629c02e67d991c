"""What each operator does to a layout: tables of rules, and the small engine that lifts them to a mesh."""
