#!/bin/sh
# An aarch64 Python with torch under $1, from Debian's arm64 packages and PyPI's wheels, run by qemu-user as $1/python.
# The rest: pip of this machine. Root is not needed: apt keeps its state under $1.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
pip=$*
apt="apt-get -qq -o Dir::State=$folder/apt -o Dir::State::lists=$folder/apt/lists -o Dir::State::status=/dev/null
  -o Dir::Cache=$folder/apt/cache -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Debug::NoLocking=1
  -o APT::Sandbox::User=$(id -un)"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/debs"
$apt update
version=$($apt -s install python3-minimal | sed -n 's/^Inst \(python3\.[0-9]*\)-minimal .*/\1/p')
(cd "$folder/debs" && $apt download $version-minimal lib$version-minimal lib$version-stdlib libc6 libexpat1 zlib1g \
  libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libgcc-s1 libstdc++6 libuuid1 libcrypt1)
for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$folder/root"; done

# The newest torch whose aarch64 wheel on PyPI is of CPUs; its other dependencies are of x86-64's CUDA.
get="$pip install -q --disable-pip-version-check --target $folder/site --platform manylinux_2_28_aarch64
  --platform manylinux_2_17_aarch64 --python-version ${version#python} --only-binary=:all:"
$get --no-deps torch==2.10.0
$get --upgrade numpy pytest hypothesis sympy networkx jinja2 fsspec filelock typing_extensions

cat > "$folder/python" <<END
#!/bin/sh
export PYTHONHOME=$folder/root/usr PYTHONPATH="\$PYTHONPATH:$folder/site"
exec qemu-aarch64 -cpu max -L $folder/root -0 $folder/python $folder/root/usr/bin/$version "\$@"
END
chmod +x "$folder/python"
