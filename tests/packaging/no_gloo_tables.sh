# no_gloo_tables.sh NM PROGRAM: fails where PROGRAM defines a table of virtual functions or a type of namespace gloo.
"$1" "$2" > "$2.symbols" || exit 1
grep -q ' _ZN8lockstep' "$2.symbols" || { echo "$2: nm shows nothing of lockstep, so nothing can be said"; exit 1; }
if grep -E ' [^U] _ZT[VI]N4gloo' "$2.symbols"; then
  echo "$2 defines these tables of Gloo, whose true layout only LibTorch knows"
  exit 1
fi
