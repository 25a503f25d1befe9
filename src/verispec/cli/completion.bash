_verispec() {
    local IFS=$'\n'
    COMPREPLY=($(verispec completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _verispec verispec
