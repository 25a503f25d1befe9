_verispec() {
    local -a found
    found=(${(f)"$(verispec completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ${#found} )); then compadd -- $found; else _files; fi
}
compdef _verispec verispec
