// Package transfer carries the bytes of snapshots, and of what moves, from the agent of one node to that of another, over the agents' port: one call, whose
// answer is a stream. It knows nothing of who may ask, and keeps nothing: whoever asks says from where on.
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

// Request asks for the bytes that a copy is made of, or for those of what moves.
type Request struct {
	// Copy is the key of the volume that they are for: its object says what it is a copy of.
	Copy string `json:"copy"`
	// Move: that volume itself is to come to the caller's node.
	Move bool `json:"move,omitempty"`
	// Snapshot: with Move, it is the snapshot of that key that is to come. A node of before that knows nothing of it answers for the volume of the key, if that moves, too.
	Snapshot bool `json:"snapshot,omitempty"`
	// Head: what they are of is wanted, and none of them.
	Head bool `json:"head,omitempty"`
	// From is the first byte that is wanted.
	From int64 `json:"from,omitempty"`
	// Created of the origin that the bytes before From are of; zero: there are none.
	Created time.Time `json:"created,omitzero"`
}

// what names whose bytes are asked for, among all that may be.
func (r Request) what() string {
	if r.Snapshot {
		return "snapshot " + r.Copy
	}
	return r.Copy
}

// Source opens what the copy of a request is made of. ErrNotFound if the caller may not have it.
type Source func(ctx context.Context, r Request) (volume.Origin, error)

// header is the first message of an answer: what volume.Origin says, but for the bytes.
type header struct {
	ID      string             `json:"id"`
	Created time.Time          `json:"created"`
	Size    int64              `json:"size"`
	Sector  int64              `json:"sector"`
	Carries filesystem.Type    `json:"filesystem,omitempty"`
	State   volume.FormatState `json:"state,omitempty"`
	Type    filesystem.Type    `json:"type,omitempty"`
	// Scheme by which its bytes are encrypted, and what its record says of their header. The bytes are sent as they are kept.
	Scheme volume.Scheme      `json:"encryption,omitempty"`
	Header volume.FormatState `json:"header,omitempty"`
	UUID   string             `json:"headerUUID,omitempty"`
	// Pool that has a volume that moves, and the labels of its record.
	Pool   string            `json:"pool,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Claims int64             `json:"claims,omitempty"`
}

// Each message after the first is a piece: the offset (8 bytes, big endian), the CRC-32C of the offset and the data (4 bytes), the data. The last
// has the size as its offset, and no data: without it the answer is not whole.
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

// Limiter is asked before so many bytes are sent, and waits until they may be.
type Limiter interface {
	WaitN(ctx context.Context, n int) error
}

// server answers. The bytes of a copy are read once at a time, so that memory is bounded by the copies that there are.
type server struct {
	open  Source
	limit Limiter

	mu    sync.Mutex
	turns map[string]*turn // by Request.what
}

// turn says who reads the bytes of a copy, and who asked for them last; either may be nobody.
type turn struct{ reading, last *reading }

// reading is an answer that is under way, or waits to be.
type reading struct {
	stop func()
	done chan struct{} // closed at its end
}

// take ends the answer for a copy that is under way, whose caller has given it up, and returns the context for another one; end is to be called
// when that is through. Of several that wait it is the last one's turn: whoever asked before has given up, even where that is not known here yet.
// ErrUnavailable for the others, and if the one before does not end while the caller waits.
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

// leave takes one that asked off its turn, and forgets the turn if nobody is left. The caller holds mu.
func (s *server) leave(key string, now *turn, mine *reading) {
	if now.last == mine {
		now.last = nil
	}
	if *now == (turn{}) && s.turns[key] == now {
		delete(s.turns, key)
	}
}

// Register has a gRPC server answer with what a source opens; limit, which may be nil, is for all answers together. Its burst has to be volume.ReadSize at
// least.
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
		r.From = 0 // the caller finds by the header that it is another one
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

// Open asks an agent for the bytes of a copy, and returns what they are of. Its Read begins a call of its own; each time what is there must
// be what was there before: ErrUnavailable if not.
func Open(ctx context.Context, agent grpc.ClientConnInterface, key string) (volume.Origin, error) {
	return open(ctx, agent, Request{Copy: key})
}

// OpenMove is Open for the volume of a key, which is to come to the caller's node: its home seals it for that.
func OpenMove(ctx context.Context, agent grpc.ClientConnInterface, key string) (volume.Origin, error) {
	return open(ctx, agent, Request{Copy: key, Move: true})
}

// OpenSnapshotMove is OpenMove for the snapshot of a key.
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
		ctx, cancel := context.WithCancel(ctx) // the other side stops when this one does
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

// ask begins a call and reads the header of the answer.
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

// receive hands on what comes until it is whole.
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
