from cachesvc.cli.main import main

main()
