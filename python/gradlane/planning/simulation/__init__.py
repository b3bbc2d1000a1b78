"""What a cluster would do: profiles, simulations of them, and what follows for a person.

`profiles` reads and checks profile files, `simulation` asks the compiled core, `grid` evaluates a
profile over workers, rates and strategies, `advice` says in words what would help. Nothing here
imports torch.
"""
