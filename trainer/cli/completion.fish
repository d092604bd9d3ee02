# An offer is a line of text that nothing expands. The program is what installed it.
function _train_complete
    COMP_LINE=(commandline -cp | string collect) PROGRAM query=fish 2> /dev/null
end
complete -c train -f -a '(_train_complete)'
