# For bash and zsh: an offer is a line of text that nothing expands. The program is what installed it.
_train_complete() {
    local offer
    COMPREPLY=()
    while IFS= read -r offer; do COMPREPLY+=("$offer"); done < <(
        COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORD="$2" PROGRAM query=bash 2> /dev/null
    )
}
_train_complete_zsh() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a offers=("${(@f)$(COMP_LINE="$line" PROGRAM query=zsh 2> /dev/null)}")
    compadd -S '' -- "${offers[@]}"
}
if [ -n "$ZSH_VERSION" ]; then
    whence compdef > /dev/null || { autoload -Uz compinit && compinit; }
    compdef _train_complete_zsh train
else
    complete -o nospace -o default -F _train_complete train
fi
