// Package transfer sends the bytes of snapshots, and of what moves, from the agent of one node to that of another, over the agents' port: by one call, whose
// answer is a stream. It does not check who may ask (Source does), and has no state of a copy: the request says at which byte to begin.
package transfer

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Service is the name of the service, as a full method begins with it: /ashlar.v1.Transfer/Read.
const Service = "ashlar.v1.Transfer"

const method = "Read"

// Request asks the node of an origin for its bytes: the origin of a copy, or what moves to the caller's node.
type Request struct {
	// Copy is the key of the volume that is copied to. The object of that volume says what it is a copy of.
	Copy string `json:"copy"`
	// Move: the volume with that key moves to the caller's node, and its own bytes are asked for.
	Move bool `json:"move,omitempty"`
	// Snapshot: with Move, the snapshot with that key moves. An older agent does not know this field, and answers for the volume with that key, if that
	// moves too.
	Snapshot bool `json:"snapshot,omitempty"`
	// Head: only the header is wanted, and no bytes.
	Head bool `json:"head,omitempty"`
	// From is the offset of the first byte that is wanted.
	From int64 `json:"from,omitempty"`
	// Created is volume.Origin.Created of the origin that the caller has the bytes before From of; zero: it has none.
	Created time.Time `json:"created,omitzero"`
}

// what identifies the copy or move that a request is for. Only one answer at a time is given for it (server.take).
func (r Request) what() string {
	if r.Snapshot {
		return "snapshot " + r.Copy
	}
	return r.Copy
}

// Source returns the origin that a request asks for; ErrNotFound if the caller may not have it.
type Source func(ctx context.Context, r Request) (volume.Origin, error)

// header is the first message of an answer: a volume.Origin without Read, Object and Generation.
type header struct {
	ID      string             `json:"id"`
	Created time.Time          `json:"created"`
	Size    int64              `json:"size"`
	Sector  int64              `json:"sector"`
	Carries filesystem.Type    `json:"filesystem,omitempty"`
	State   volume.FormatState `json:"state,omitempty"`
	Type    filesystem.Type    `json:"type,omitempty"`
	// Scheme is how the bytes are encrypted: they are sent as the pool keeps them. Header and UUID are what the record says of their header.
	Scheme volume.Scheme      `json:"encryption,omitempty"`
	Header volume.FormatState `json:"header,omitempty"`
	UUID   string             `json:"headerUUID,omitempty"`
	// Pool, Labels and Claims: see volume.Origin. They are for a volume that moves.
	Pool   string            `json:"pool,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Claims int64             `json:"claims,omitempty"`
}

// Each message after the first is a piece: the offset (8 bytes, big endian), the CRC-32C of the offset and the data (4 bytes, big endian), the data. The last
// piece has the size as its offset, and no data: without it the answer is not complete.
const pieceHeader = 12

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(piece []byte) uint32 {
	return crc32.Update(crc32.Checksum(piece[:8], castagnoli), castagnoli, piece[pieceHeader:])
}

func encode(buffer []byte, at int64, data []byte) []byte {
	buffer = append(buffer[:0], make([]byte, pieceHeader)...)
	buffer = append(buffer, data...)
	binary.BigEndian.PutUint64(buffer, uint64(at))
	binary.BigEndian.PutUint32(buffer[8:], sum(buffer))
	return buffer
}

func decode(piece []byte) (at int64, data []byte, err error) {
	if len(piece) < pieceHeader {
		return 0, nil, fmt.Errorf("%w: a piece of %d bytes came", errdefs.ErrUnavailable, len(piece))
	}
	at = int64(binary.BigEndian.Uint64(piece))
	if have, want := sum(piece), binary.BigEndian.Uint32(piece[8:]); have != want {
		return 0, nil, fmt.Errorf("%w: what came for byte %d has the checksum %08x, and was sent with %08x", errdefs.ErrUnavailable, at, have, want)
	}
	return at, piece[pieceHeader:], nil
}

// Limiter limits how fast bytes are sent: WaitN waits until n bytes may be.
type Limiter interface {
	WaitN(ctx context.Context, n int) error
}

// server answers requests. At any time it reads the bytes of a copy for one answer only: so its memory is bounded by the number of copies.
type server struct {
	open  Source
	limit Limiter

	mu    sync.Mutex
	turns map[string]*turn // by Request.what
}

// turn is the answer that reads the bytes of a copy now, and the answer that was asked for last; either may be nil.
type turn struct{ reading, last *reading }

// reading is an answer that reads the bytes of a copy, or waits for its turn.
type reading struct {
	stop func()
	done chan struct{} // closed at its end
}

// take gives the turn of a copy to a new answer, and returns the context of that; the caller calls end when the answer has ended. An earlier answer is
// stopped first, and waited for: its caller has given it up, as it would not have asked again, even if this node does not know that yet. Of several answers
// that wait the last one gets the turn. ErrUnavailable for the others, and if the earlier one does not end while the caller waits.
func (s *server) take(ctx context.Context, key string) (_ context.Context, end func(), err error) {
	ctx, stop := context.WithCancel(ctx)
	mine := &reading{stop, make(chan struct{})}
	s.mu.Lock()
	now := s.turns[key]
	if now == nil {
		now = &turn{}
		s.turns[key] = now
	}
	now.last = mine
	for now.reading != nil && now.last == mine && ctx.Err() == nil {
		before := now.reading
		s.mu.Unlock()
		before.stop()
		select {
		case <-before.done:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	if now.reading != nil || now.last != mine {
		stop()
		s.leave(key, now, mine)
		return nil, nil, fmt.Errorf("%w: copy %s is being read already, or was asked for once more since", errdefs.ErrUnavailable, key)
	}
	now.reading = mine
	return ctx, func() {
		stop()
		s.mu.Lock()
		now.reading = nil
		s.leave(key, now, mine)
		s.mu.Unlock()
		close(mine.done)
	}, nil
}

// leave takes an answer off the turn of a copy, and deletes the turn if it has no answer any more. The caller holds mu.
func (s *server) leave(key string, now *turn, mine *reading) {
	if now.last == mine {
		now.last = nil
	}
	if *now == (turn{}) && s.turns[key] == now {
		delete(s.turns, key)
	}
}

// Register has a gRPC server answer requests with the origins that open returns. limit, which may be nil, limits all answers together; its burst has to be
// volume.ReadSize at least.
func Register(r grpc.ServiceRegistrar, open Source, limit Limiter) {
	r.RegisterService(&grpc.ServiceDesc{ServiceName: Service, HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{StreamName: method, ServerStreams: true,
		Handler: func(s any, stream grpc.ServerStream) error { return s.(*server).read(stream) }}}}, &server{open: open, limit: limit, turns: map[string]*turn{}})
}

func (s *server) read(stream grpc.ServerStream) error {
	message := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(message); err != nil {
		return err
	}
	var r Request
	if err := json.Unmarshal(message.GetValue(), &r); err != nil || r.From < 0 {
		return fmt.Errorf("%w: this is no request for the bytes of a copy: %w", errdefs.ErrInvalid, err)
	}
	ctx := stream.Context()
	from, err := s.open(ctx, r)
	if err != nil {
		return err
	}
	if !r.Created.IsZero() && !r.Created.Equal(from.Created) {
		r.From = 0 // the origin is another one than the caller's, which finds that by the header
	}
	text, err := json.Marshal(header{from.ID.String(), from.Created, from.Size, from.Sector, from.Filesystem, from.Format.State, from.Format.Type,
		from.Scheme, from.Header.State, from.Header.UUID, from.Pool, from.Labels, from.Claims})
	if err != nil {
		return err
	}
	if err := stream.SendMsg(wrapperspb.Bytes(text)); err != nil || r.Head {
		return err
	}
	ctx, end, err := s.take(ctx, r.what())
	if err != nil {
		return err
	}
	defer end()
	var buffer []byte
	send := func(at int64, data []byte) error {
		if s.limit != nil {
			if err := s.limit.WaitN(ctx, len(data)); err != nil {
				return err
			}
		}
		buffer = encode(buffer, at, data)
		return stream.SendMsg(wrapperspb.Bytes(buffer)) // it is marshalled, and so copied, before this returns
	}
	if err := from.Read(ctx, r.From, send); err != nil {
		return err
	}
	return send(from.Size, nil)
}

// Open asks an agent for the origin of the copy with a key. Each call of the origin's Read is a request of its own, and fails with ErrUnavailable if the
// agent has another origin by then.
func Open(ctx context.Context, agent grpc.ClientConnInterface, key string) (volume.Origin, error) {
	return open(ctx, agent, Request{Copy: key})
}

// OpenMove is Open for the volume with a key, which moves to the caller's node. Its home seals it for that.
func OpenMove(ctx context.Context, agent grpc.ClientConnInterface, key string) (volume.Origin, error) {
	return open(ctx, agent, Request{Copy: key, Move: true})
}

// OpenSnapshotMove is Open for the snapshot with a key, which moves to the caller's node.
func OpenSnapshotMove(ctx context.Context, agent grpc.ClientConnInterface, key string) (volume.Origin, error) {
	return open(ctx, agent, Request{Copy: key, Move: true, Snapshot: true})
}

func open(ctx context.Context, agent grpc.ClientConnInterface, r Request) (volume.Origin, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.Head = true
	_, origin, err := ask(ctx, agent, r)
	if err != nil {
		return volume.Origin{}, err
	}
	origin.Read = func(ctx context.Context, from int64, visit func(at int64, data []byte) error) error {
		ctx, cancel := context.WithCancel(ctx) // so that the other side stops when this one does
		defer cancel()
		stream, now, err := ask(ctx, agent, Request{Copy: r.Copy, Move: r.Move, Snapshot: r.Snapshot, From: from, Created: origin.Created})
		if err != nil {
			return err
		}
		if now.ID != origin.ID || !now.Created.Equal(origin.Created) || now.Size != origin.Size {
			return fmt.Errorf("%w: %s is another one now than a moment ago; it is copied anew", errdefs.ErrUnavailable, origin.ID)
		}
		return receive(stream, origin.Size, visit)
	}
	return origin, nil
}

// ask begins a call and reads the header of the answer. The origin that it returns has no Read.
func ask(ctx context.Context, agent grpc.ClientConnInterface, r Request) (grpc.ClientStream, volume.Origin, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, volume.Origin{}, err
	}
	stream, err := agent.NewStream(ctx, &grpc.StreamDesc{StreamName: method, ServerStreams: true}, "/"+Service+"/"+method,
		grpc.MaxCallRecvMsgSize(2*volume.ReadSize))
	if err != nil {
		return nil, volume.Origin{}, err
	}
	first := &wrapperspb.BytesValue{}
	if err := errors.Join(stream.SendMsg(wrapperspb.Bytes(text)), stream.CloseSend(), stream.RecvMsg(first)); err != nil {
		return nil, volume.Origin{}, err
	}
	var h header
	if err := json.Unmarshal(first.GetValue(), &h); err != nil {
		return nil, volume.Origin{}, fmt.Errorf("%w: the answer cannot be read: %w", errdefs.ErrUnavailable, err)
	}
	id, err := volume.ParseID(h.ID)
	if err != nil || h.Size <= 0 || h.Sector <= 0 || h.Created.IsZero() {
		return nil, volume.Origin{}, fmt.Errorf("%w: the answer is of %q with %d bytes in sectors of %d", errdefs.ErrUnavailable, h.ID, h.Size, h.Sector)
	}
	return stream, volume.Origin{ID: id, Created: h.Created, Size: h.Size, Sector: h.Sector, Contents: volume.Contents{Filesystem: h.Carries, Scheme: h.Scheme},
		Format: volume.Format{State: h.State, Type: h.Type}, Header: volume.Header{State: h.Header, UUID: h.UUID}, Pool: h.Pool, Labels: h.Labels, Claims: h.Claims}, nil
}

// receive calls visit with each piece of an answer, until the answer is complete. ErrUnavailable if it ends before, or a checksum is wrong.
func receive(stream grpc.ClientStream, size int64, visit func(at int64, data []byte) error) error {
	for {
		message := &wrapperspb.BytesValue{}
		if err := stream.RecvMsg(message); errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: the answer ended before it was whole", errdefs.ErrUnavailable)
		} else if err != nil {
			return err
		}
		at, data, err := decode(message.GetValue())
		if err != nil {
			return err
		}
		if at == size && len(data) == 0 {
			return nil
		}
		if err := visit(at, data); err != nil {
			return err
		}
	}
}
