"""The index folder: FAISS vectors of a corpus, with what they were made from and by.

    meta.json            IndexMeta
    index.faiss          vectors, row n = corpus row n
    encoder.npz          what the encoder learned from the corpus; no arrays when it learns nothing
    corpus.*             row offsets of the corpus and what its .gz file holds, caches
    bm25/                the lexical index of retriever/lexical.py, where one was built

While it is built, a hidden folder beside it, .NAME.building, holds the vectors in shards: a build that was stopped, by
whatever, goes on with the shards that are there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import faiss
import numpy as np

from retriever.corpus import CACHE_FILES, Corpus, file_fingerprint
from retriever.encoder import Encoder, Settings, make_encoder
from retriever.types import IndexInfo, RetrieverError

META_FILE = "meta.json"
VECTORS_FILE = "index.faiss"
ENCODER_FILE = "encoder.npz"
PLAN_FILE = "plan.json"
SHARD_ROWS = 65_536  # passages encoded between two points from which a stopped build goes on
KINDS = ("flat", "fp16", "sq8", "ivf_flat", "ivf_sq8", "ivf_pq", "hnsw")
METRIC = "inner_product"

Progress = Callable[[int, int], None]  # passages encoded, passages in all

# What a lexical index leaves in its folder, and all that a build does.
_NOT_VECTORS = re.compile(rf"bm25|\.bm25\.[0-9a-f]{{32}}(\.old)?|{CACHE_FILES.pattern}")
_OWN_FILES = re.compile(rf"meta\.json|index\.faiss|encoder\.npz|plan\.json|lock|shard_\d+\.npy|{_NOT_VECTORS.pattern}")
# Cosine of a stored vector and the one that its passage gets from the same encoder. The median tells wrong settings: E5
# in bfloat16 keeps .99998, without its prefix .998, with that of queries .991. The least tells other passages (those of
# neighbouring rows of HotpotQA have .82, one in a hundred .94); ivf_pq keeps .987, and a passage that was cut at 180
# tokens, as Search-R1 did with a tenth of them, .989.
_SAME_VECTOR, _SAME_PASSAGE = 0.9995, 0.97
_SAMPLE_ROWS = 32
_NOT_COMPARED = {"name", "device", "dtype"}  # of a model: `weights` tells it apart, wherever it lies


@dataclass(frozen=True)
class IndexSpec:
    """How vectors are stored and searched, always by inner product.

    kind: `flat` float32; `fp16` and `sq8` (8 bits a number) are exact searches of rounded vectors; `ivf_flat`,
    `ivf_sq8` and `ivf_pq` (1 byte for 4 numbers) look only into the `probes` lists nearest to the query, of `lists`
    lists; `hnsw` follows a graph with `links` links a passage, keeping `candidates` passages.
    lists: 0 is the power of 2 next to 4 sqrt(passages), but at most one list for 39 passages.
    probes: 0 is 1/16 of the lists.
    Raises ValueError for a kind that does not exist or a number out of range.
    """

    kind: str = "flat"
    lists: int = 0
    probes: int = 0
    links: int = 32
    candidates: int = 128

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of index {self.kind!r}; known: {', '.join(KINDS)}")
        if self.lists < 0 or self.probes < 0 or self.links < 2 or self.candidates < 1:
            raise ValueError(
                "an index needs lists >= 0, probes >= 0, links >= 2 and candidates >= 1, got "
                f"lists={self.lists}, probes={self.probes}, links={self.links}, candidates={self.candidates}"
            )

    def for_passages(self, passages: int) -> IndexSpec:
        """Return the spec with the numbers that depend on the size of the corpus filled in."""
        if not self.kind.startswith("ivf"):
            return self
        if self.kind == "ivf_pq" and passages < 256:
            raise ValueError(f"ivf_pq learns 256 codes, which takes as many passages; for {passages} take another kind")
        lists = self.lists or max(1, min(2 ** round(np.log2(4 * passages**0.5)), passages // 39))
        return dataclasses.replace(self, lists=lists, probes=min(self.probes or max(1, lists // 16), lists))

    def label(self) -> str:
        """Return kind and numbers, as `IndexInfo.index_type` has them."""
        if self.kind == "hnsw":
            return f"hnsw links={self.links} candidates={self.candidates}"
        return f"{self.kind} lists={self.lists} probes={self.probes}" if self.kind.startswith("ivf") else self.kind

    def make(self, dim: int) -> faiss.Index:
        """Return the empty index. Raises ValueError when `dim` does not suit it."""
        if self.kind == "ivf_pq" and dim % 4:
            raise ValueError(f"ivf_pq cuts vectors into groups of 4 numbers, which dim {dim} is no multiple of")
        factory = {
            "flat": "Flat",
            "fp16": "SQfp16",
            "sq8": "SQ8",
            "ivf_flat": f"IVF{self.lists},Flat",
            "ivf_sq8": f"IVF{self.lists},SQ8",
            "ivf_pq": f"IVF{self.lists},PQ{dim // 4}np",  # np: without polysemous codes, slow to train and not used
            "hnsw": f"HNSW{self.links},Flat",
        }[self.kind]
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        if self.kind.startswith("ivf"):
            index.cp.min_points_per_centroid = 1  # otherwise FAISS prints a line for each codebook of a small corpus
        if self.kind == "ivf_pq":
            index.pq.cp.min_points_per_centroid = 1
        set_effort(index, self.candidates if self.kind == "hnsw" else self.probes)
        return index

    @property
    def shard_dtype(self) -> type:
        """The type in which encoded vectors wait: no less exact than the index."""
        return np.float32 if self.kind in ("flat", "ivf_flat", "hnsw") else np.float16


@dataclass(frozen=True)
class IndexMeta:
    """What an index was built from: `corpus_id` of the corpus, `settings()` of the encoder.

    vectors_id: `file_fingerprint` of the vectors, "" when it is not known.
    """

    corpus_id: str
    passages: int
    dim: int
    index_type: str
    encoder: Settings
    metric: str = METRIC
    vectors_id: str = ""

    def info(self) -> IndexInfo:
        encoder = settings_text(self.encoder)
        return IndexInfo(self.corpus_id, self.passages, encoder, self.dim, self.index_type, self.encoder)


@dataclass(frozen=True)
class PassageIndex:
    """An open index: `vectors` answers inner-product searches with corpus rows."""

    vectors: faiss.Index
    meta: IndexMeta


def settings_text(settings: Mapping[str, str | int | float | bool]) -> str:
    """Return an encoder's settings on one line.

    >>> settings_text({"name": "e5", "query_prefix": "query: ", "dim": 384})
    "e5 query_prefix='query: ' dim=384"
    """
    values = {key: value if str(value) and " " not in str(value) else repr(value) for key, value in settings.items()}
    return " ".join([str(settings["name"]), *(f"{key}={value}" for key, value in values.items() if key != "name")])


def has_index(folder: str | Path) -> bool:
    """Whether the folder holds a finished index of vectors."""
    return (Path(folder) / META_FILE).is_file()


def set_effort(vectors: faiss.Index, effort: int) -> None:
    """Set how much of an approximate index a search looks at: lists of IVF, candidates of HNSW. Others search all."""
    if isinstance(vectors, faiss.IndexIVF):
        vectors.nprobe = min(effort, vectors.nlist)
    elif isinstance(vectors, faiss.IndexHNSW):
        vectors.hnsw.efSearch = effort


def search_label(kind: str, vectors: faiss.Index) -> str:
    """Return the kind with what searches of these vectors look at, as `IndexSpec.label` has it."""
    if isinstance(vectors, faiss.IndexIVF):
        return f"{kind} lists={vectors.nlist} probes={vectors.nprobe}"
    if isinstance(vectors, faiss.IndexHNSW):
        return f"{kind} links={vectors.hnsw.nb_neighbors(1)} candidates={vectors.hnsw.efSearch}"
    return kind


# building


def build_index(
    corpus_path: str | Path,
    folder: str | Path,
    encoder: Encoder,
    *,
    spec: IndexSpec | None = None,
    source: faiss.Index | None = None,
    overwrite: bool = False,
    batch_size: int = 1024,
    shard_rows: int = SHARD_ROWS,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> IndexMeta | None:
    """Fit the encoder, encode every passage and write the index folder; return its description, on rank 0.

    The folder appears complete or not at all. Stopped at any point, the same call goes on from the last shard.

    spec: how vectors are stored, flat by default. source: an index over the same corpus by the same encoder, whose
    vectors are taken instead of encoding the passages again. overwrite: replace an index that is there, and a stopped
    build with other settings. batch_size: passages encoded at a time. rank, world_size, barrier: of processes that
    share the encoding, shard by shard; `barrier` waits for all of them.
    Raises FileExistsError when the folder holds anything else, or an index without `overwrite`; RetrieverError for a
    bad corpus and for a stopped build with other settings.
    """
    if batch_size < 1 or shard_rows < 1:
        raise ValueError(f"batch_size and shard_rows must be at least 1, got {batch_size} and {shard_rows}")
    folder = Path(folder)
    if rank == 0:
        refuse_to_overwrite(folder, overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
    barrier()
    with build_lock(folder, rank, barrier) as workshop:
        if rank == 0:
            refuse_to_overwrite(folder, overwrite)  # another process may have been faster
            corpus = Corpus(corpus_path, cache_dir=workshop)
        barrier()
        if rank > 0:
            corpus = Corpus(corpus_path, cache_dir=workshop)
        spec = (spec or IndexSpec()).for_passages(len(corpus))
        spec.make(encoder.dim)  # unsuitable settings are found before hours of encoding
        plan = {
            "corpus_id": corpus.corpus_id,
            "encoder": encoder.settings(),
            "dtype": np.dtype(spec.shard_dtype).name,
            "shard_rows": shard_rows,
            "from_vectors": source is not None,
        }
        if rank == 0:
            _start_or_continue(workshop, plan, overwrite)
        fitted_here = rank == 0 and not (workshop / ENCODER_FILE).exists()
        if fitted_here:
            encoder.fit(corpus[row].contents for row in range(len(corpus)))
            _write_whole(workshop / ENCODER_FILE, lambda path: np.savez(path, **encoder.state()))
        barrier()
        if not fitted_here and encoder.state():
            encoder = _read_encoder(workshop, encoder.settings())
        if source is not None:
            check_source(source, corpus, encoder)
        shards = _shard_paths(workshop, len(corpus), shard_rows)
        todo = [(n, path) for n, path in enumerate(shards) if not path.exists()]
        barrier()  # all processes must see the same shards missing
        done = len(corpus) - sum(min(shard_rows, len(corpus) - n * shard_rows) for n, _ in todo)
        for n, path in todo[rank::world_size]:
            start, end = n * shard_rows, min((n + 1) * shard_rows, len(corpus))
            vectors = np.empty((end - start, encoder.dim), spec.shard_dtype)
            for row in range(start, end, batch_size):
                stop = min(row + batch_size, end)
                if source is None:
                    found = encoder.encode_passages([corpus[i].contents for i in range(row, stop)])
                else:
                    found = source.reconstruct_batch(np.arange(row, stop))
                vectors[row - start : stop - start] = found
                done = min(done + (stop - row) * world_size, len(corpus))
                if progress:
                    progress(done, len(corpus))
            _write_whole(path, partial(np.save, arr=vectors))
        barrier()
        if rank:
            return None
        meta = _assemble(workshop, shards, corpus, encoder, spec)
        _publish(workshop, folder, overwrite)
    return meta


def _assemble(workshop: Path, shards: Sequence[Path], corpus: Corpus, encoder: Encoder, spec: IndexSpec) -> IndexMeta:
    """Merge the shards into one index, which is held in memory while it is made, and write it with its description."""
    vectors = spec.make(encoder.dim)
    if not vectors.is_trained:
        vectors.train(_sample(shards, len(corpus), max(100_000, 64 * spec.lists)))
    for path in shards:
        for block in _blocks(np.load(path, mmap_mode="r")):
            vectors.add(block)
    _write_whole(workshop / VECTORS_FILE, lambda path: faiss.write_index(vectors, str(path)))
    fingerprint = file_fingerprint(workshop / VECTORS_FILE)
    meta = IndexMeta(
        corpus.corpus_id, len(corpus), encoder.dim, spec.label(), encoder.settings(), vectors_id=fingerprint
    )
    text = json.dumps(asdict(meta), indent=2) + "\n"
    _write_whole(workshop / META_FILE, lambda path: path.write_text(text))
    return meta


def _sample(shards: Sequence[Path], passages: int, size: int) -> np.ndarray:
    """Return about `size` vectors, evenly spread over all shards, [n, dim] float32."""
    stride = max(1, passages // size)
    return np.concatenate([np.load(path, mmap_mode="r")[::stride].astype(np.float32) for path in shards])


def _blocks(vectors: np.ndarray, rows: int = 65_536) -> Iterator[np.ndarray]:
    """Yield consecutive rows as float32, a block at a time."""
    for start in range(0, len(vectors), rows):
        yield np.ascontiguousarray(vectors[start : start + rows], dtype=np.float32)


def _shard_paths(workshop: Path, passages: int, shard_rows: int) -> list[Path]:
    return [workshop / f"shard_{n:05d}.npy" for n in range(-(-passages // shard_rows))]


def _start_or_continue(workshop: Path, plan: dict, overwrite: bool) -> None:
    """Write the plan, or check that the shards of a stopped build belong to it; `overwrite` drops them otherwise."""
    path = workshop / PLAN_FILE
    text = json.dumps(plan, indent=2) + "\n"
    if path.exists() and path.read_text() != text:
        if not overwrite:
            raise RetrieverError(
                f"{workshop}: holds the vectors of a stopped build with another corpus, encoder or kind of vectors; "
                "repeat that command to finish it, or drop them with --overwrite"
            )
        for old in (*workshop.glob("shard_*.npy"), workshop / ENCODER_FILE):
            old.unlink(missing_ok=True)
    _write_whole(path, lambda path: path.write_text(text))


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it is there complete or not at all, also after a power cut."""
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def build_lock(folder: Path, rank: int = 0, barrier: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Make the hidden folder beside an index folder and keep other builds of that index waiting; return its path.

    It is removed when it holds no shard in the end.
    """
    workshop = folder.with_name(f".{folder.name}.building")
    if rank:
        barrier()
        yield workshop
        return
    while True:
        workshop.mkdir(exist_ok=True)
        try:
            lock = (workshop / "lock").open("w")
        except FileNotFoundError:  # just published or removed
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock.fileno()), (workshop / "lock").stat()):
                break
        except FileNotFoundError:
            pass
        lock.close()
    try:
        barrier()
        for half_written in workshop.glob(".*"):
            half_written.unlink()
        yield workshop
    finally:
        if workshop.exists() and not any(workshop.glob("shard_*.npy")):
            shutil.rmtree(workshop, ignore_errors=True)
        lock.close()


def refuse_to_overwrite(folder: Path, overwrite: bool, vectors: bool = True) -> None:
    """Raise FileExistsError unless the folder may be written: absent, without vectors, or an index with `overwrite`.

    An index is a folder with an `IndexMeta` and none but files of ours: nothing else is ever removed. vectors: whether
    vectors are to be written; a lexical index may be added to an index.
    """
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    is_index = folder.is_dir() and _is_index(folder)
    if is_index and not vectors:
        return
    foreign = sorted(name for name in names if not (_OWN_FILES if is_index else _NOT_VECTORS).fullmatch(name))
    if is_index and not overwrite:
        raise FileExistsError(f"{folder} already holds an index: give another folder, or ask to overwrite it")
    if foreign:
        what = "holds files that are no part of its index" if is_index else "exists and is not an index"
        raise FileExistsError(
            f"{folder} {what} ({', '.join(foreign[:5])}{', ...' if foreign[5:] else ''}): give another folder or move "
            "them away"
        )


def _is_index(folder: Path) -> bool:
    try:
        read_meta(folder)
    except (RetrieverError, OSError):
        return False
    return True


def _publish(workshop: Path, folder: Path, overwrite: bool) -> None:
    """Give the finished folder its name, then drop what only the build needed: killed in between, nothing is lost."""
    refuse_to_overwrite(folder, overwrite)
    old = workshop.with_name(f"{workshop.name}.{uuid.uuid4().hex}.old")
    if folder.exists():
        if (folder / "bm25").is_dir():
            (folder / "bm25").rename(workshop / "bm25")
        folder.rename(old)
    workshop.rename(folder)
    for place in folder.parent.iterdir():  # also what a killed build has left
        if place.name.startswith(f"{workshop.name}.") and place.suffix == ".old":
            shutil.rmtree(place, ignore_errors=True)
    for path in (*folder.glob("shard_*.npy"), folder / PLAN_FILE, folder / "lock"):
        path.unlink()


# opening


def load_index(
    folder: str | Path, encoder: Mapping[str, str | int | float | bool] | None = None
) -> tuple[PassageIndex, Encoder]:
    """Open an index folder, vectors memory-mapped, with the encoder it was built with.

    encoder: settings to use in place of the index's own; only `name` (where the same model lies), `device` and `dtype`
    can differ. Raises RetrieverError naming the file when it is missing, damaged or does not fit the others, and when
    another encoder is asked for.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if meta.vectors_id and (folder / VECTORS_FILE).exists():
        if file_fingerprint(folder / VECTORS_FILE) != meta.vectors_id:
            raise RetrieverError(
                f"{folder / VECTORS_FILE}: damaged, cut or of another build ({META_FILE} was written with another "
                "file); copy both again or build the index again"
            )
    vectors = read_vectors(folder / VECTORS_FILE)
    if (vectors.ntotal, vectors.d) != (meta.passages, meta.dim):
        raise RetrieverError(
            f"{folder / VECTORS_FILE}: holds {vectors.ntotal} vectors of dim {vectors.d}, but {META_FILE} says "
            f"{meta.passages} of dim {meta.dim}; build the index again"
        )
    asked = dict(encoder or {})
    check_encoder(meta, asked)
    moved = {key: asked[key] for key in _NOT_COMPARED & set(asked)}
    return PassageIndex(vectors, meta), _read_encoder(folder, meta.encoder | moved)


def read_vectors(path: Path) -> faiss.Index:
    """Open a FAISS file memory-mapped. Raises RetrieverError when it is missing, damaged or not by inner product."""
    try:
        with path.open("rb") as file:
            inverted_lists = file.read(2) == b"Iw"  # the two kinds of mapping exclude each other
        vectors = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if inverted_lists else faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, OSError, MemoryError) as error:
        reason = "damaged, cut or not a FAISS index" if path.exists() else "missing"
        raise RetrieverError(f"{path}: {reason}; build the index again") from error
    if vectors.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise RetrieverError(f"{path}: scores must be inner products, this index has another metric; build it again")
    return vectors


def adopt_vectors(path: str | Path, corpus: Corpus, encoder: Encoder) -> PassageIndex:
    """Open a FAISS file that has no description, as Search-R1's e5_Flat.index, for a corpus and a declared encoder.

    See `check_source` for what must agree; RetrieverError is raised otherwise.
    """
    vectors = read_vectors(Path(path))
    check_source(vectors, corpus, encoder, str(path))
    if isinstance(vectors, faiss.IndexIVF):
        vectors.set_direct_map_type(faiss.DirectMap.NoMap)
    label = search_label(type(vectors).__name__, vectors)
    meta = IndexMeta(corpus.corpus_id, len(corpus), encoder.dim, label, encoder.settings())
    return PassageIndex(vectors, meta)


def check_source(vectors: faiss.Index, corpus: Corpus, encoder: Encoder, name: str = "the index") -> None:
    """Raise RetrieverError unless these are the vectors of this corpus by this encoder, as far as a sample tells.

    The number of vectors must be that of the passages, and 32 vectors, the first and the last among them, must be those
    that the encoder gives their passages. Inverted lists get a direct map, 8 bytes a vector.
    """
    if vectors.ntotal != len(corpus):
        raise RetrieverError(
            f"{name}: holds {vectors.ntotal} vectors, but {corpus.path} has {len(corpus)} passages; give the corpus "
            "that the index was built from"
        )
    if vectors.d != encoder.dim:
        raise RetrieverError(
            f"{name}: its vectors have {vectors.d} numbers, those of the encoder {encoder.settings()['name']!r} have "
            f"{encoder.dim}; name the encoder that the index was built with"
        )
    rows = np.unique(np.linspace(0, len(corpus) - 1, _SAMPLE_ROWS).astype(np.int64))
    try:
        if isinstance(vectors, faiss.IndexIVF):
            vectors.make_direct_map()
        stored = vectors.reconstruct_batch(rows)
    except RuntimeError as error:
        raise RetrieverError(
            f"{name}: FAISS reads none of its vectors by row ({type(vectors).__name__}, or ids other than the rows of "
            "the corpus), so nothing tells whether they are those of this corpus; give an index without ids of its own"
        ) from error
    expected = encoder.encode_passages([corpus[int(row)].contents for row in rows])
    norms = np.linalg.norm(stored, axis=1) * np.linalg.norm(expected, axis=1)
    both_zero = ~stored.any(axis=1) & ~expected.any(axis=1)
    cosines = np.where(norms > 0, (stored * expected).sum(axis=1) / np.maximum(norms, 1e-12), both_zero)
    rounded = isinstance(vectors, (faiss.IndexPQ, faiss.IndexIVFPQ))  # too much to tell settings
    median, least = float(np.median(cosines)), int(cosines.argmin())
    if cosines[least] < _SAME_PASSAGE or (median < _SAME_VECTOR and not rounded):
        raise RetrieverError(
            f"{name}: its vectors are not those of this corpus by this encoder (cosine {cosines[least]:.3f} in row "
            f"{rows[least]}, {median:.4f} in the middle, where the same gives 1; the encoder is "
            f"{settings_text(encoder.settings())}); correct the encoder, its pooling, passage_prefix or max_length, or "
            "give the corpus that the index was built from"
        )


def check_match(meta: IndexMeta, corpus: Corpus, encoder: Mapping[str, str | int | float | bool]) -> None:
    """Raise RetrieverError unless the index was built from this corpus with this encoder.

    encoder: the settings to compare; those left out may have any value.
    """
    if meta.corpus_id != corpus.corpus_id:
        raise RetrieverError(
            f"{corpus.path}: the index was built from another corpus or another version of it "
            f"({meta.passages} passages, sha256 {meta.corpus_id[:12]}; this file has {len(corpus)}, sha256 "
            f"{corpus.corpus_id[:12]}); build the index again or give the corpus it was built from"
        )
    check_encoder(meta, encoder)


def check_encoder(meta: IndexMeta, encoder: Mapping[str, str | int | float | bool]) -> None:
    """Raise RetrieverError unless these settings, as far as they are given, are those of the index.

    The name of a model is not compared, its folder may have moved: `weights` is, when the model is loaded.
    """
    by_name = "weights" not in meta.encoder or encoder.get("name") == "hashed"
    ignored = _NOT_COMPARED - ({"name"} if by_name else set())
    different = [
        f"{key} is {meta.encoder.get(key)!r} in the index, {value!r} asked for"
        for key, value in encoder.items()
        if key not in ignored and meta.encoder.get(key) != value
    ]
    if different:
        raise RetrieverError(
            f"the index was built with another encoder ({'; '.join(different)}); build the index again or ask for its "
            "own encoder"
        )


def shard_vectors(vectors: faiss.Index, devices: Sequence[int | str], chunk_rows: int = 65_536) -> faiss.Index:
    """Return the vectors in float16, spread over `devices` in equal parts, copied `chunk_rows` at a time.

    devices: numbers of GPUs, or "cpu". No more than a chunk is in memory twice, and never a whole part in float32.
    vectors: an index that stores whole vectors; the memory-mapped one is read once from start to end.
    """
    shards = faiss.IndexShards(vectors.d, True, True)  # one thread a part; rows count on from part to part
    bounds = np.linspace(0, vectors.ntotal, len(devices) + 1).astype(np.int64)
    for device, start, end in zip(devices, bounds[:-1].tolist(), bounds[1:].tolist()):
        part = _float16_index(vectors.d, device)
        for row in range(start, end, chunk_rows):
            part.add(vectors.reconstruct_n(row, min(chunk_rows, end - row)))
        shards.add_shard(part)  # keeps it alive
    return shards


def _float16_index(dim: int, device: int | str) -> faiss.Index:
    if device == "cpu":
        return faiss.index_factory(dim, "SQfp16", faiss.METRIC_INNER_PRODUCT)
    config = faiss.GpuIndexFlatConfig()
    config.device = device
    config.useFloat16 = True
    return faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), dim, config)


def build_command(corpus_path: str | Path, folder: str | Path) -> str:
    """Return the sentence that tells how to build an index."""
    return f"build it with: python -m retriever.build --corpus {corpus_path} --out {folder}"


def read_meta(folder: Path) -> IndexMeta:
    """Return the description of an index folder. Raises RetrieverError when there is none, or it is damaged."""
    path = folder / META_FILE
    try:
        return IndexMeta(**json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise RetrieverError(
            f"{folder}: no index here ({META_FILE} is missing); {build_command('CORPUS', folder)}"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RetrieverError(f"{path}: not the description of an index ({error}); build the index again") from error


def _read_encoder(folder: Path, settings: Settings) -> Encoder:
    path = folder / ENCODER_FILE
    try:
        with np.load(path) as arrays:
            state = dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RetrieverError(
            f"{path}: cannot restore the encoder of the index ({error}); build the index again"
        ) from error
    try:
        return make_encoder(settings, state)
    except (ValueError, KeyError) as error:
        raise RetrieverError(
            f"{path}: cannot restore the encoder of the index ({error}); build the index again"
        ) from error
