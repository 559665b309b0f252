"""Write the demo's checkpoint: real tensor names and file layout, small shapes, deterministic values."""

from __future__ import annotations

from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fixtures import synthetic

if __name__ == "__main__":
    target = Path(sys.argv[1])
    geometry = synthetic.text_geometry(8, h=256, inter=768, heads=4, kv=2, d=64, vocab=4096)
    synthetic.write_base(target, geometry, salt=1, shards=2)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"wrote {target}: {size / 1e6:.0f} MB in {len(list(target.iterdir()))} files")
