#!/bin/bash
# trim.sh VENV: remove what no recipe uses from an installed environment, then compile the rest.
# Runs in the image build. tests/container/test_image.py imports and trains with the result.
set -euo pipefail
cd "$1/lib/python3.11/site-packages"
before=$(du -sm . | cut -f1)

# C++ headers, for compiling custom operators: there is no compiler in the image.
rm -rf paddle/include
# OpenVINO's CPU plugin: loaded only where Paddle Inference is asked for the OpenVINO engine.
rm -f paddle/libs/libopenvino_intel_cpu_plugin.so
# The packages' own tests, among them private keys that only tests use.
rm -rf future/tests future/backports/test
for package in Crypto matplotlib mpl_toolkits networkx numpy pandas scipy sklearn; do
    find "$package" -type d \( -name tests -o -name SelfTest \) -prune -exec rm -rf {} +
done
# VisualDL's page speaks English and Chinese; Babel brings 1,000 other locales.
find babel/locale-data -name '*.dat' ! -name 'root.dat' ! -name 'en*' ! -name 'zh*' -delete
# Stubs for type checkers and sources for Cython.
find . \( -name '*.pyi' -o -name '*.pxd' -o -name '*.pyx' \) -delete

# Byte code in the image, for a user of any uid cannot write it later, and an import of Paddle
# without it takes seconds. It is tied to its source by a hash that is not checked at run time.
"$1"/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash . ||
    echo "trim: some files are templates or for another Python and stay uncompiled"
echo "trim: $before MiB before, $(du -sm . | cut -f1) MiB with byte code after"
