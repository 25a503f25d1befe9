complete -c verispec -a '(verispec completion words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
