// Package export is the protocol, over the agents' port, between the node that has a volume (its home) and the node that uses it. It does not check who
// may ask.
package export

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/call"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Service is the name of the service, as a full method begins with it: /ashlar.v1.Export/Open.
const Service = "ashlar.v1.Export"

// Home is a node that has volumes, for the nodes that use them. The caller's claim has a generation. Each call may be repeated. Errors of all calls:
//
//   - errdefs.ErrBusy: something else is being done to the volume, for a short time;
//   - errdefs.ErrPrecondition: the volume is not claimed for the caller, or by another generation. HomeAt returns it for errdefs.ErrInUse too, which has the
//     same gRPC code (call.Refused): something on the home uses the volume;
//   - errdefs.ErrUnavailable: the home cannot find that out now.
type Home interface {
	// Open exports a volume to the caller. It ends an export for another claim first; one for this claim stays as it is (Opened.Otherwise, Opened.Again).
	Open(ctx context.Context, id volume.ID, generation int64) (Opened, error)
	// Record returns the record of a volume that is exported to the caller, or claimed for it.
	Record(ctx context.Context, id volume.ID, generation int64) (blockdev.Record, error)
	// SetLabels changes labels of such a record, all or none: those in before to what is in after. Labels that are in neither stay, those only in before are
	// removed. Only labels that volume.Local.SwapLabels takes can be changed. errdefs.ErrBusy if the labels are not as in before. It returns the new record.
	SetLabels(ctx context.Context, id volume.ID, generation int64, before, after map[string]string) (blockdev.Record, error)
	// Marks returns what was written to a leg that is exported to the caller since an era: see volume.Local.Marks. errdefs.ErrUnsupported if the home is of a
	// version without marks.
	Marks(ctx context.Context, id volume.ID, generation int64, since uint32) ([]blockdev.Extent, error)
	// BeginEra begins an era of the marks of such a leg: see volume.Local.BeginEra. errdefs.ErrUnsupported if the home keeps no marks of it, or is of a
	// version without marks.
	BeginEra(ctx context.Context, id volume.ID, generation int64) (number uint32, err error)
	// Close ends the export for a generation, if it has that NQN: a call that is late ends no later export. An empty NQN, as of an older version, ends any. So do
	// those of one of many readers.
	Close(ctx context.Context, id volume.ID, generation int64, nqn string) error
}

// User is a node that uses volumes of other nodes, for their homes. errdefs.ErrBusy: something else is being done to the volume there.
// errdefs.ErrPrecondition: the node uses no such volume of the caller by a claim of that generation; from UserAt also for errdefs.ErrInUse (call.Refused).
type User interface {
	// Modified puts all mutable parameters of a volume into force. With an error, nothing has changed.
	Modified(ctx context.Context, id volume.ID, generation int64, mutable map[string]string) error
	// Hold holds back the writes to a volume until release is called: see volume.Holder.
	Hold(ctx context.Context, id volume.ID, generation int64) (release func() error, err error)
}

// Opened is what a node needs to connect to a volume.
type Opened struct {
	Address   netip.AddrPort // of the home's NVMe/TCP target
	NQN, Host string         // the NQN of the subsystem, and that of the host which may connect
	Secret    secret.Text    // for DH-HMAC-CHAP; empty: none is needed
	PSK       secret.Text    // for TLS; empty: the connection is in plain text
	UUID      string         // of the namespace, with dashes
	Size      int64          // of the device, in bytes
	// Otherwise: the export is with TLS and the home is to export without it by now, or the other way round. It stays so until Close: a connection goes on,
	// and no new one is made.
	Otherwise bool
	// Again: the export is no new one, so what the caller wrote by an earlier connection may be on its way still. Close waits for that.
	Again  bool
	Record blockdev.Record
}

const (
	methodOpen      = "Open"
	methodRecord    = "Record"
	methodSetLabels = "SetLabels"
	methodMarks     = "Marks"
	methodBeginEra  = "BeginEra"
	methodClose     = "Close"
	methodModified  = "Modified"
	methodHold      = "Hold"
)

// request is the request of all calls.
type request struct {
	Volume     string            `json:"volume"`
	Generation int64             `json:"generation"`
	Before     map[string]string `json:"before,omitempty"`
	After      map[string]string `json:"after,omitempty"`
	Mutable    map[string]string `json:"mutable,omitempty"`
	Since      uint32            `json:"since,omitempty"` // an era
	NQN        string            `json:"nqn,omitempty"`   // of the export that is to end
}

// Of: see call.Request.
func (r request) Of() string { return r.Volume }

// answer is the answer to all calls; that to Close and Modified is empty.
type answer struct {
	Record *record `json:"record,omitempty"`
	Opened *Wire   `json:"opened,omitempty"`
	Held   bool    `json:"held,omitempty"` // of Hold: writes are held back until the caller closes its side of the stream
	// Written is of Marks: ranges, each with its offset and its length. Era is of BeginEra; 0 if no marks are kept.
	Written [][2]int64 `json:"written,omitempty"`
	Era     uint32     `json:"era,omitempty"`
}

// Wire is an Opened as it is sent, without the record.
type Wire struct {
	Address netip.AddrPort `json:"address"`
	NQN     string         `json:"nqn"`
	Host    string         `json:"host"`
	Secret  string         `json:"secret,omitempty"`
	PSK     string         `json:"psk,omitempty"`
	UUID    string         `json:"uuid"`
	Size    int64          `json:"size"`

	Otherwise bool `json:"otherwise,omitempty"`
	Again     bool `json:"again,omitempty"`
}

// WireOf returns an Opened as it is sent.
func WireOf(o Opened) *Wire {
	return &Wire{o.Address, o.NQN, o.Host, o.Secret.Reveal(), o.PSK.Reveal(), o.UUID, o.Size, o.Otherwise, o.Again}
}

// Of returns the Opened of a volume that another node has sent, without the record; ErrUnavailable if it is incomplete.
func (w *Wire) Of(id volume.ID) (Opened, error) {
	if w == nil || w.NQN == "" || w.Host == "" || w.Size <= 0 || !w.Address.IsValid() {
		return Opened{}, fmt.Errorf("%w: the answer does not say where volume %s is exported", errdefs.ErrUnavailable, id)
	}
	return Opened{Address: w.Address, NQN: w.NQN, Host: w.Host, Secret: secret.Of(w.Secret), PSK: secret.Of(w.PSK), UUID: w.UUID, Size: w.Size, Otherwise: w.Otherwise, Again: w.Again}, nil
}

// record is a blockdev.Record as it is sent; the volume is always ready.
type record struct {
	Name    string            `json:"name"`
	Size    int64             `json:"size"`
	Thin    bool              `json:"thin,omitempty"`
	Sector  int64             `json:"sector,omitempty"`
	Origin  string            `json:"origin,omitempty"`
	Created time.Time         `json:"created"`
	Labels  map[string]string `json:"labels,omitempty"`
}

func fromRecord(r blockdev.Record) *record {
	out := &record{Name: r.Name, Size: r.Size, Thin: r.Thin, Sector: r.Sector, Created: r.Created, Labels: r.Labels}
	if r.Origin != (blockdev.Ref{}) {
		out.Origin = r.Origin.String()
	}
	return out
}

func (r *record) of(id volume.ID) (blockdev.Record, error) {
	if r == nil || r.Size <= 0 {
		return blockdev.Record{}, fmt.Errorf("%w: the answer has no record of volume %s", errdefs.ErrUnavailable, id)
	}
	out := blockdev.Record{Ref: blockdev.Ref{Kind: id.Kind, Key: id.Key}, Name: r.Name, Size: r.Size, Thin: r.Thin, Sector: r.Sector, Created: r.Created, Labels: r.Labels, Ready: true}
	if r.Origin != "" {
		out.Origin = blockdev.ParseRef(r.Origin)
	}
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	return out, nil
}

// Register makes a gRPC server answer for a node, as the home of its volumes and as a user of others.
func Register(r grpc.ServiceRegistrar, home Home, user User) {
	methods := map[string]func(ctx context.Context, id volume.ID, r request) (answer, error){
		methodOpen: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			o, err := home.Open(ctx, id, r.Generation)
			return answer{Record: fromRecord(o.Record), Opened: WireOf(o)}, err
		},
		methodRecord: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			have, err := home.Record(ctx, id, r.Generation)
			return answer{Record: fromRecord(have)}, err
		},
		methodSetLabels: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			have, err := home.SetLabels(ctx, id, r.Generation, r.Before, r.After)
			return answer{Record: fromRecord(have)}, err
		},
		methodMarks: func(ctx context.Context, id volume.ID, r request) (out answer, err error) {
			written, err := home.Marks(ctx, id, r.Generation, r.Since)
			for _, e := range written {
				out.Written = append(out.Written, [2]int64{e.Offset, e.Length})
			}
			return out, err
		},
		methodBeginEra: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			era, err := home.BeginEra(ctx, id, r.Generation)
			if errors.Is(err, errdefs.ErrUnsupported) { // an answer, as an error would arrive as another one with the same gRPC code
				return answer{}, nil
			}
			return answer{Era: era}, err
		},
		methodClose: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			return answer{}, home.Close(ctx, id, r.Generation, r.NQN)
		},
		methodModified: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			return answer{}, user.Modified(ctx, id, r.Generation, r.Mutable)
		},
	}
	description := &grpc.ServiceDesc{ServiceName: Service, HandlerType: (*any)(nil), Methods: call.Methods(Service, methods), Streams: []grpc.StreamDesc{{StreamName: methodHold, ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error { return hold(stream, user) }}}}
	r.RegisterService(description, nil)
}

// hold holds back writes until the caller closes its side of the stream, or is gone.
func hold(stream grpc.ServerStream, user User) error {
	message := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(message); err != nil {
		return err
	}
	r, id, err := call.Parse[request](Service, message)
	if err != nil {
		return err
	}
	release, err := user.Hold(stream.Context(), id, r.Generation)
	if err != nil {
		return err
	}
	text, err := json.Marshal(answer{Held: release != nil})
	if err == nil {
		err = stream.SendMsg(wrapperspb.Bytes(text))
	}
	if release == nil {
		return err
	}
	if err == nil {
		if err = stream.RecvMsg(message); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	return errors.Join(err, release())
}

// HomeAt returns the Home at the other end of a connection.
func HomeAt(agent grpc.ClientConnInterface) Home { return client{agent} }

// UserAt returns the User at the other end of a connection.
func UserAt(agent grpc.ClientConnInterface) User { return client{agent} }

type client struct{ agent grpc.ClientConnInterface }

func (c client) call(ctx context.Context, method string, r request) (out answer, err error) {
	err = call.Ask(ctx, c.agent, Service, method, r, &out)
	return out, err
}

// Open: see Home.
func (c client) Open(ctx context.Context, id volume.ID, generation int64) (Opened, error) {
	out, err := c.call(ctx, methodOpen, request{Volume: id.String(), Generation: generation})
	if err != nil {
		return Opened{}, err
	}
	o, err := out.Opened.Of(id)
	if err == nil {
		o.Record, err = out.Record.of(id)
	}
	return o, err
}

// Record: see Home.
func (c client) Record(ctx context.Context, id volume.ID, generation int64) (blockdev.Record, error) {
	out, err := c.call(ctx, methodRecord, request{Volume: id.String(), Generation: generation})
	if err != nil {
		return blockdev.Record{}, err
	}
	return out.Record.of(id)
}

// SetLabels: see Home.
func (c client) SetLabels(ctx context.Context, id volume.ID, generation int64, before, after map[string]string) (blockdev.Record, error) {
	out, err := c.call(ctx, methodSetLabels, request{Volume: id.String(), Generation: generation, Before: before, After: after})
	if err != nil {
		return blockdev.Record{}, err
	}
	return out.Record.of(id)
}

// Marks: see Home.
func (c client) Marks(ctx context.Context, id volume.ID, generation int64, since uint32) (written []blockdev.Extent, err error) {
	out, err := c.call(ctx, methodMarks, request{Volume: id.String(), Generation: generation, Since: since})
	if err != nil {
		return nil, unknown(err)
	}
	for _, e := range out.Written {
		if e[0] < 0 || e[1] <= 0 {
			return nil, fmt.Errorf("%w: the answer says that %d bytes from %d on of volume %s were written", errdefs.ErrUnavailable, e[1], e[0], id)
		}
		written = append(written, blockdev.Extent{Offset: e[0], Length: e[1]})
	}
	return written, nil
}

// BeginEra: see Home.
func (c client) BeginEra(ctx context.Context, id volume.ID, generation int64) (number uint32, err error) {
	out, err := c.call(ctx, methodBeginEra, request{Volume: id.String(), Generation: generation})
	if err == nil && out.Era == 0 {
		err = fmt.Errorf("%w: the home of volume %s keeps no marks of it", errdefs.ErrUnsupported, id)
	}
	return out.Era, unknown(err)
}

// unknown returns ErrUnsupported if the other side does not know a call, as it is of an older version; any other error as it is.
func unknown(err error) error {
	if errors.Is(err, errdefs.ErrUnknownCall) {
		return errdefs.Recast(errdefs.ErrUnsupported, err, "the other node is of a version before marks")
	}
	return err
}

// Close: see Home.
func (c client) Close(ctx context.Context, id volume.ID, generation int64, nqn string) error {
	_, err := c.call(ctx, methodClose, request{Volume: id.String(), Generation: generation, NQN: nqn})
	return err
}

// Modified: see User.
func (c client) Modified(ctx context.Context, id volume.ID, generation int64, mutable map[string]string) error {
	_, err := c.call(ctx, methodModified, request{Volume: id.String(), Generation: generation, Mutable: mutable})
	return err
}

// Hold: see User. The call goes on until release is called, or ctx ends.
func (c client) Hold(ctx context.Context, id volume.ID, generation int64) (release func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		if release == nil {
			cancel()
		}
	}()
	text, err := json.Marshal(request{Volume: id.String(), Generation: generation})
	if err != nil {
		return nil, err
	}
	stream, err := c.agent.NewStream(ctx, &grpc.StreamDesc{StreamName: methodHold, ServerStreams: true, ClientStreams: true}, "/"+Service+"/"+methodHold)
	if err != nil {
		return nil, call.Refused(err, methodHold, id.String())
	}
	first := &wrapperspb.BytesValue{}
	if err := stream.SendMsg(wrapperspb.Bytes(text)); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, RecvMsg returns why the stream has ended
		return nil, err
	}
	if err := stream.RecvMsg(first); err != nil {
		return nil, call.Refused(err, methodHold, id.String())
	}
	var out answer
	if err := json.Unmarshal(first.GetValue(), &out); err != nil {
		return nil, fmt.Errorf("%w: the answer to %s of volume %s cannot be read: %w", errdefs.ErrUnavailable, methodHold, id, err)
	}
	if !out.Held {
		return nil, nil
	}
	return sync.OnceValue(func() error {
		defer cancel()
		err := stream.CloseSend()
		if err == nil {
			if err = stream.RecvMsg(&wrapperspb.BytesValue{}); errors.Is(err, io.EOF) {
				return nil
			}
		}
		return errdefs.Recast(errdefs.ErrUnavailable, err, "the writes to volume %s may not have been held back", id)
	}), nil
}
