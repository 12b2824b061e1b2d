"""Locality-sensitive hashing attention (https://arxiv.org/abs/2001.04451)."""

import functools
import math

from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.padding import pad_axis
from keras_attn.ops.parts import attend_by_heads

# columns that are enough for 2 ** 20 buckets, the most that there may be
AUTOMATIC_COLUMNS = 64
_MOST_BITS = 20
# the bucket of padding, behind all others
_LAST_BUCKET = 2**24
_NOWHERE = 2**30
# scores of a query with itself, which count if there are no others, and of
# what it does not see
_SELF, _LOWEST = -1e9, -2e9


def lsh_buckets(
    query, rotations, num_buckets=None, bucket_size=64, padding_mask=None
):
    """Hashes positions such that similar queries are likely to share a bucket.

    A query is compared with random directions; its bucket is the direction, or
    the opposite of one, that it is most similar to (section 2 of the paper).
    How long a query is as a vector makes no difference.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        rotations: Tensor of shape `(N, H, R, columns)`, random directions for
            each of `R` rounds. There must be half as many columns as buckets,
            or half the sum of their factors; more are ignored.
        num_buckets: Even integer, or a tuple of even factors of the number of
            buckets: each has a hash of its own, which saves columns. `None`
            stands for the largest power of two up to `2 * L / bucket_size`
            for a sequence of `L` positions without padding, factorized such
            that `AUTOMATIC_COLUMNS` are enough.
        bucket_size: Integer that `None` refers to.
        padding_mask: Boolean tensor of shape `(B, T)` that `None` refers to,
            `True` for the positions that are not padding.

    Returns:
        Integer tensor of shape `(B, N, R, T)`.
    """
    query, rotations = (
        ops.stop_gradient(at_least_float32(ops.convert_to_tensor(x)))
        for x in (query, rotations)
    )

    def hash_heads(_, query, rotations):
        return _hash(query, rotations, num_buckets, bucket_size, padding_mask)

    return attend_by_heads(hash_heads, (query, rotations), (2, 0), 1)


def _hash(query, rotations, num_buckets, bucket_size, padding_mask):
    """Hashes a few heads; the arguments are those of `lsh_buckets()`."""
    rotated = ops.einsum("btnh,nhrk->bnrtk", query, rotations)
    if num_buckets is not None:
        if isinstance(num_buckets, int):
            num_buckets = (num_buckets,)
        return _combine_hashes(rotated, [n // 2 for n in num_buckets])
    length, most_bits = ops.shape(query)[1], _MOST_BITS
    if isinstance(length, int):
        most_bits = (2 * (length // bucket_size)).bit_length() - 1
        most_bits = max(1, min(most_bits, _MOST_BITS))
        if padding_mask is None:
            return _combine_hashes(rotated, _automatic_halves(most_bits))
    if padding_mask is None:
        length = ops.convert_to_tensor(length)
    else:
        length = ops.sum(ops.cast(padding_mask, "int32"), axis=1)
        length = length[:, None, None, None]
    # padding must not count, or else it would change the buckets of the rest:
    # each sequence picks its own number of them
    buckets = _combine_hashes(rotated, _automatic_halves(1))
    for bits in range(2, most_bits + 1):
        buckets = ops.where(
            length >= bucket_size * 2 ** (bits - 1),
            _combine_hashes(rotated, _automatic_halves(bits)),
            buckets,
        )
    return buckets


def _automatic_halves(bits):
    """Halves of the factors of `2 ** bits` buckets."""
    for count in range(1, bits + 1):
        small, rest = divmod(bits, count)
        powers = [small] * (count - rest) + [small + 1] * rest
        halves = [2 ** (power - 1) for power in powers]
        if sum(halves) <= AUTOMATIC_COLUMNS:
            return halves


def _combine_hashes(rotated, halves):
    """Hashes with a few columns each; the first hash counts units."""
    bucket, unit, start = 0, 1, 0
    for half in halves:
        columns = rotated[..., start : start + half]
        # the argmax of the columns and their opposites, which need no room
        digit = ops.where(
            ops.max(columns, axis=-1) >= -ops.min(columns, axis=-1),
            ops.argmax(columns, axis=-1),
            half + ops.argmin(columns, axis=-1),
        )
        bucket = bucket + unit * ops.cast(digit, "int32")
        unit, start = unit * 2 * half, start + half
    return bucket


def lsh_attention(
    query,
    value,
    buckets,
    bucket_size,
    chunks_before=1,
    chunks_after=0,
    wrap=False,
    attend_across_buckets=True,
    allow_duplicates=True,
    prefix_consistent=False,
    padding_mask=None,
    use_causal_mask=False,
    key=None,
    start=None,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention among positions that fall into the same buckets.

    Queries serve as keys too, scaled to unit length. In each round of hashing,
    positions are sorted by bucket and cut into chunks of `bucket_size`; a
    query sees its own chunk and those around it, except itself, which it sees
    only if there is nothing else in any round. All rounds share one softmax.
    Time and memory grow as
    `T * bucket_size`, times the rounds and the chunks that are seen.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        value: Tensor of shape `(B, T, N, V)`.
        buckets: Integer tensor of shape `(B, N, R, T)`, the bucket of each
            position in each of `R` rounds, as `lsh_buckets()` returns it.
        bucket_size: Positive integer, the number of positions in a chunk.
        chunks_before: Number of chunks before its own that a query sees.
        chunks_after: Number of chunks after its own that a query sees.
        wrap: Whether the first chunk of a round comes after the last one of
            the round before, and that of the first round after the last one
            of all. Published programs do this, the paper does not.
        attend_across_buckets: Whether a query sees positions of other buckets
            that lie in its chunks.
        allow_duplicates: Whether a key that a query meets several times, in
            different rounds, counts as often. Otherwise it counts once
            (equation 16 of the paper).
        prefix_consistent: Whether a query sees, in each round, the last
            `chunks_before * bucket_size` positions of its own bucket, and no
            chunks. What a query sees then depends on earlier positions only.
            It needs `use_causal_mask`.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the
            positions that may be attended.
        use_causal_mask: Whether to hide the positions after a query's.
        key: Tensor of shape `(B, S, N, H)`, the queries of all positions, if
            `query` holds only some of them. All arguments but `query` then
            have length `S`, and all pairs of queries and keys are scored.
        start: Integer or scalar integer tensor, the position of the first
            query among the keys.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the attention weights too,
            as they are before dropout. This scores all pairs, at more than
            the cost of full attention.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, a tuple of it and of the weights, of
        shape `(B, N, T, T)`.
    """
    if prefix_consistent and not use_causal_mask:
        raise ValueError("`prefix_consistent` needs `use_causal_mask`.")
    options = {
        "bucket_size": bucket_size,
        "chunks_before": chunks_before,
        "chunks_after": chunks_after,
        "wrap": wrap,
        "attend_across_buckets": attend_across_buckets,
        "allow_duplicates": allow_duplicates,
        "prefix_consistent": prefix_consistent,
        "padding_mask": padding_mask,
        "use_causal_mask": use_causal_mask,
        "key": key,
        "start": start,
        "dropout": dropout,
        "return_attention_scores": return_attention_scores,
    }
    if return_attention_scores or key is not None:
        return _attend(query, value, buckets, **options)
    return attend_by_heads(
        lambda _, *tensors: _attend(*tensors, **options),
        (query, value, buckets),
        (2, 2, 1),
    )


def _attend(
    query,
    value,
    buckets,
    bucket_size,
    chunks_before,
    chunks_after,
    wrap,
    attend_across_buckets,
    allow_duplicates,
    prefix_consistent,
    padding_mask,
    use_causal_mask,
    key,
    start,
    dropout,
    return_attention_scores,
):
    """Attends with a few heads; the arguments are those of the above."""
    score_all_pairs = return_attention_scores or key is not None
    key = query if key is None else key
    check_equal_lengths("`lsh_attention`", key, value)
    if isinstance(key.shape[1], int):
        bucket_size = min(bucket_size, key.shape[1])
    length, num_rounds = ops.shape(key)[1], buckets.shape[2]
    num_chunks = (length + bucket_size - 1) // bucket_size
    padding = num_chunks * bucket_size - length
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(key)[:2], dtype="bool")
    padding_mask = ops.cast(padding_mask, "bool")
    padding_mask = pad_axis(padding_mask, 0, padding, axis=1)

    # the sort is stable, and leaves padding at the end, out of the way
    buckets = pad_axis(buckets, 0, padding, axis=3)
    buckets = ops.where(padding_mask[:, None, None], buckets, _LAST_BUCKET)
    order = ops.argsort(buckets, axis=-1)  # (B, N, R, P)
    slots = ops.argsort(order, axis=-1)
    places = slots if prefix_consistent else slots // bucket_size
    one_bucket = prefix_consistent or not attend_across_buckets
    reach = chunks_before * bucket_size if prefix_consistent else None
    count_visits = functools.partial(
        _count_visits,
        before=chunks_before,
        after=chunks_after,
        num_chunks=num_chunks if wrap else None,
        one_bucket=one_bucket,
        reach=reach,
    )
    if score_all_pairs:
        queries = ops.arange(ops.shape(query)[1], dtype="int32")
        queries = queries if start is None else queries + start
        pairs = _pair_up(places, buckets, queries, length)
        exists = padding_mask[:, None, None, :length]
        return _attend_all_pairs(
            query,
            key,
            value,
            ops.where(exists, count_visits(*pairs), 0),
            queries[:, None],
            ops.arange(length, dtype="int32"),
            allow_duplicates,
            use_causal_mask,
            dropout,
            return_attention_scores,
        )

    def to_chunks(x):
        """Cuts what is sorted, `(B, N, R, P, ...)`, into chunks."""
        batch, heads, _, _, *rest = ops.shape(x)
        return ops.reshape(
            x, (batch, heads, num_rounds, num_chunks, bucket_size, *rest)
        )

    def sort(x):
        """Sorts `(B, T, N, ...)` into `(B, N, R, C, W, ...)`."""
        x = pad_axis(x, 0, padding, axis=1)
        return to_chunks(_sort_rows(x, order))

    look = functools.partial(
        _with_neighbours, before=chunks_before, after=chunks_after, wrap=wrap
    )
    num_real = ops.sum(ops.cast(padding_mask, "int32"), axis=1)
    all_slots = ops.arange(num_chunks * bucket_size, dtype="int32")
    is_real = all_slots < num_real[:, None]
    queries = to_chunks(order)[..., None]
    # what is not there comes after everything
    keys = to_chunks(ops.where(is_real[:, None, None], order, _NOWHERE))
    keys = look(keys, fill=_NOWHERE)[..., None, :]
    if use_causal_mask:
        visible = keys < queries
    else:
        visible = (keys != queries) & (keys < _NOWHERE)
    if one_bucket:
        labels = to_chunks(_label(buckets, order))
        visible = visible & (labels[..., None] == look(labels)[..., None, :])
    if reach is not None:
        # chunks only arrange the keys: as many places back for every query
        rows = ops.arange(bucket_size, dtype="int32")[:, None]
        columns = ops.arange(-reach, bucket_size, dtype="int32")
        visible = visible & (rows - columns <= reach)

    size = query.shape[-1]
    rows = sort(ops.concatenate([query, value], axis=-1))
    query, value = rows[..., :size], rows[..., size:]
    scores = ops.einsum(
        "bnrcqh,bnrckh->bnrcqk",
        at_least_float32(query),
        look(_unit_keys(query)),
    )
    if not allow_duplicates:
        visits = [
            sort(ops.transpose(x[..., :length], (0, 3, 1, 2)))
            for x in (places, buckets)
        ]  # (B, N, R, C, W, R)
        count = count_visits(*_pair_up_chunks(visits, look))
        count = ops.cast(ops.maximum(count, 1), scores.dtype)
        scores = scores - ops.log(count)
    # in which column a query finds itself
    own = ops.arange(bucket_size, dtype="int32") + chunks_before * bucket_size
    width = (chunks_before + 1 + chunks_after) * bucket_size
    columns = ops.arange(width, dtype="int32")
    is_self = ops.cast(columns == own[:, None], scores.dtype)
    # not chosen from two numbers, which `floatx()` may make infinite
    unseen = _LOWEST + (_SELF - _LOWEST) * is_self
    scores = ops.where(visible, scores, unseen)
    exists = ops.reshape(is_real, (-1, 1, 1, num_chunks, bucket_size, 1))
    rounds = _attend_in_rounds(scores, look(value), exists, dropout)
    rounds = _unsort_rows(rounds, slots[..., :length])  # (B, T, N, R, V + 2)
    return ops.cast(_merge_rounds(rounds), value.dtype)


def _count_visits(queries, keys, before, after, num_chunks, one_bucket, reach):
    """How often queries meet keys, given their places and buckets.

    Args:
        queries: List with an entry for each round, a pair of places and
            buckets. A place is a chunk, or with `reach` a position in the sort.
        keys: The same of the keys. All broadcast.
        before: Number of chunks before its own that a query sees.
        after: Number of chunks after its own that a query sees.
        num_chunks: Number of chunks of a round, if all rounds form a ring.
        one_bucket: Whether queries see keys of their own bucket only.
        reach: How many places back a query sees, if it sees no chunks.
    """
    count = 0
    for i, (place, bucket) in enumerate(queries):
        for j, (key_place, key_bucket) in enumerate(keys):
            if i != j and (one_bucket or num_chunks is None):
                continue
            distance = place - key_place
            if reach is not None:
                visits = (distance >= 0) & (distance <= reach)
            elif num_chunks is not None:
                distance = distance + (i - j) * num_chunks
                visits = sum(
                    ops.cast(
                        (distance - look) % (len(keys) * num_chunks) == 0,
                        "int32",
                    )
                    for look in range(-after, before + 1)
                )
            else:
                visits = (distance >= -after) & (distance <= before)
            visits = ops.cast(visits, "int32")
            if one_bucket:
                visits = visits * ops.cast(bucket == key_bucket, "int32")
            count = count + visits
    return count


def _pair_up(places, buckets, queries, length):
    """Arguments of `_count_visits()` for all pairs of queries and keys."""
    keys = [
        (places[:, :, i, None, :length], buckets[:, :, i, None, :length])
        for i in range(buckets.shape[2])
    ]
    queries = [
        [ops.swapaxes(ops.take(x, queries, axis=-1), 2, 3) for x in pair]
        for pair in keys
    ]
    return queries, keys


def _pair_up_chunks(visits, look):
    """Arguments of `_count_visits()` for the pairs within chunks.

    Args:
        visits: Places and buckets of shape `(B, N, R, C, W, R)`, with those in
            every round last.
        look: Function that joins the chunks that each chunk sees.
    """
    rounds = range(visits[0].shape[-1])
    queries = [[x[..., i][..., None] for x in visits] for i in rounds]
    visits = [look(x) for x in visits]
    return queries, [[x[..., i][..., None, :] for x in visits] for i in rounds]


def _label(buckets, order):
    """Sorted buckets that differ between rounds, `(B, N, R, P)`.

    Rounds that lie on a ring must not take each other's for their own.
    """
    num_rounds = buckets.shape[2]
    labels = ops.take_along_axis(buckets, order, axis=-1) * num_rounds
    return labels + ops.arange(num_rounds, dtype="int32")[:, None]


def _attend_in_rounds(scores, value, exists, dropout):
    """Attends in each round by itself.

    Args:
        scores: Tensor of shape `(B, N, R, C, W, K)`.
        value: Tensor of shape `(B, N, R, C, K, V)`.
        exists: Boolean tensor of shape `(B, 1, 1, C, W, 1)`, `False` for
            padding, which does not even see itself.
        dropout: Callable applied to the attention weights, or `None`.

    Returns:
        Tensor of shape `(B, N, R, C, W, V + 2)`: the heads of each round, the
        sum of the exponentials of its scores, and the highest of its scores,
        which has been subtracted from them. Where nothing is seen, the sum is
        zero, and the heads are arbitrary.
    """
    highest = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    # to divide heads is cheaper than to divide weights
    weights = ops.exp(scores - highest)
    total = ops.sum(weights, axis=-1, keepdims=True)
    weights = ops.cast(weights, value.dtype)
    weights = weights if dropout is None else dropout(weights)
    heads = ops.einsum("bnrcqk,bnrckv->bnrcqv", weights, value)
    heads = ops.cast(heads, scores.dtype) / total
    sees = exists | (highest > _SELF)
    total = ops.where(sees, total, ops.zeros_like(total))
    return ops.concatenate([heads, total, highest], axis=-1)


def _merge_rounds(rounds):
    """Merges `(B, T, N, R, V + 2)`, what rounds attend to, into one softmax."""
    heads, total, highest = (
        rounds[..., :-2],
        rounds[..., -2:-1],
        rounds[..., -1:],
    )
    # rounds weigh as much as the sums of their exponentials
    highest = highest - ops.max(highest, axis=3, keepdims=True)
    shares = total * ops.exp(highest)
    shares = shares / _nonzero(ops.sum(shares, axis=3, keepdims=True))
    return ops.sum(shares * heads, axis=3)


def _attend_all_pairs(
    query,
    key,
    value,
    count,
    queries,
    keys,
    allow_duplicates,
    use_causal_mask,
    dropout,
    return_attention_scores,
):
    """Attends to keys that are met `count` times, a `(B, N, T, S)` tensor."""
    visible = keys < queries if use_causal_mask else keys != queries
    visible = visible & (count > 0)
    is_alone = ops.logical_not(ops.any(visible, axis=-1, keepdims=True))
    visible = visible | (is_alone & (keys == queries) & (count > 0))
    scores = ops.einsum(
        "btnh,bsnh->bnts", at_least_float32(query), _unit_keys(key)
    )
    if allow_duplicates:
        count = ops.cast(ops.maximum(count, 1), scores.dtype)
        scores = scores + ops.log(count)
    weights = ops.cast(masked_softmax(scores, visible), value.dtype)
    dropped = weights if dropout is None else dropout(weights)
    output = ops.einsum("bnts,bsnv->btnv", dropped, value)
    return (output, weights) if return_attention_scores else output


def _nonzero(total):
    """Sums of weights to divide by; without weights, there is nothing to."""
    return ops.where(total > 0, total, ops.ones_like(total))


def _unit_keys(query):
    """Queries as keys, which are scaled to length 1."""
    query = at_least_float32(query)
    size = query.shape[-1]
    # not `ops.mean`, which gives float32 for float64 on PyTorch
    mean = ops.sum(ops.square(query), axis=-1, keepdims=True) / size
    return query * (ops.rsqrt(mean + 1e-6) / math.sqrt(size))


def _sort_rows(x, order):
    """Gathers `(B, T, N, F)` in an order `(B, N, R, T)`, once per round."""
    batch, length, heads, size = ops.shape(x)
    sequences = ops.arange(batch, dtype="int32")[:, None, None, None]
    head = ops.arange(heads, dtype="int32")[:, None, None]
    rows = (sequences * length + order) * heads + head
    return ops.take(ops.reshape(x, (-1, size)), rows, axis=0)


def _unsort_rows(x, slots):
    """Gathers from `(B, N, R, C, W, F)` the rows in slots `(B, N, R, T)`.

    Returns a tensor of shape `(B, T, N, R, F)`.
    """
    batch, heads, rounds, chunks, chunk_size, size = ops.shape(x)
    sorts = ops.arange(batch * heads * rounds, dtype="int32")
    sorts = ops.reshape(sorts, (batch, heads, rounds, 1))
    rows = ops.transpose(sorts * chunks * chunk_size + slots, (0, 3, 1, 2))
    return ops.take(ops.reshape(x, (-1, size)), rows, axis=0)


def _with_neighbours(x, before, after, wrap, fill=0):
    """Joins chunks `(B, N, R, C, W, ...)` to those around them, along `W`."""
    if not before and not after:
        return x
    batch, heads, rounds, chunks, *rest = ops.shape(x)
    if wrap:
        ring = ops.reshape(x, (batch, heads, rounds * chunks, *rest))
        looks = [
            ops.reshape(ops.roll(ring, -shift, axis=2), ops.shape(x))
            for shift in range(-before, after + 1)
        ]
    else:
        x = pad_axis(x, before, after, axis=3, value=fill)
        looks = [
            x[:, :, :, shift : shift + chunks]
            for shift in range(before + after + 1)
        ]
    return ops.concatenate(looks, axis=4)
