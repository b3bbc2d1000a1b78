"""What runs of weeks meet: very many steps, ranks that stand still, full disks."""
