package port

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
)

// Audience returns the audience of the tokens with which the agent of a node is called. With such a token, that agent cannot call another one.
func Audience(node string) string { return audiences + node }

// nodeOfToken is the key under which a TokenReview has the node of the token's pod (ServiceAccountTokenPodNodeInfo, since Kubernetes 1.29).
const nodeOfToken = "authentication.kubernetes.io/node-name"

// audiences begins all audiences; guard.yaml has it too.
const audiences = "ashlar.dev/agent/"

// callers has the service accounts, in the driver's namespace, that may call a service.
var callers = map[string][]string{
	"/csi.v1.SnapshotMetadata/":  {"ashlar-controller"},
	"/" + transfer.Service + "/": {"ashlar-node"}, // agent.OpenCopy checks who may read which bytes
	"/" + export.Service + "/":   {"ashlar-node"}, // agent.Exports checks who may use which volume
	"/" + move.Service + "/":     {"ashlar-node"}, // agent.Moving checks which volume moves for whom
}

type callerNode struct{}

// CallerNode returns the node of the pod that makes a call, as the API server knows it by the call's token; empty if it knows none.
func CallerNode(ctx context.Context) string {
	node, _ := ctx.Value(callerNode{}).(string)
	return node
}

// Server serves the port of an agent.
type Server struct {
	Node      string
	Namespace string // of the driver
	// Config connects to the API server, which knows whose token one is.
	Config *rest.Config
}

// Serve serves calls until ctx ends, and closes the listener: see rpc.Serve. It sets services.Remote.
func (s Server) Serve(ctx context.Context, listener *Listener, services rpc.Services) error {
	api, err := connect(s.Config)
	if err != nil {
		return err
	}
	door := &door{api: api, namespace: s.Namespace, audience: Audience(s.Node), asking: make(chan struct{}, reviewsAtOnce)}
	services.Remote = &rpc.Remote{TLS: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{listener.certificate}}, Allow: door.allow}
	return rpc.Serve(ctx, listener.Listener, services)
}

const (
	// knownFor is how long the API server's answer about a token is remembered: a token that becomes invalid (its pod is gone) is accepted for as long.
	knownFor = 30 * time.Second
	// mostKnown is how many tokens are remembered at once.
	mostKnown = 256
	// reviewTime is how long a call waits for the answer about its token; reviewsAtOnce is how many questions to the API server there are at once.
	reviewTime    = askTime
	reviewsAtOnce = 4
	// mostToken is the length of the longest token that is accepted, in bytes.
	mostToken = 8 << 10
)

// door decides who may call.
type door struct {
	api       *api
	namespace string
	audience  string
	asking    chan struct{} // a semaphore: it has an element for each question to the API server

	mu    sync.Mutex
	known map[[sha256.Size]byte]known // by the hash of the token
}

// caller is the user of a token, and the node of its pod.
type caller struct{ user, node string }

type known struct {
	caller
	until time.Time
}

// allow: see rpc.Remote.
func (d *door) allow(ctx context.Context, token, method string) (context.Context, error) {
	who, err := d.caller(ctx, token)
	if err != nil {
		return nil, err
	}
	for service, accounts := range callers {
		if strings.HasPrefix(method, service) &&
			slices.ContainsFunc(accounts, func(a string) bool { return who.user == "system:serviceaccount:"+d.namespace+":"+a }) {
			return context.WithValue(ctx, callerNode{}, who.node), nil
		}
	}
	return nil, fmt.Errorf("%w: %s may not call %s", errdefs.ErrPrecondition, who.user, method)
}

// caller returns whose token one is. ErrUnavailable if that cannot be found out now; any other error if the token is not valid for this agent.
func (d *door) caller(ctx context.Context, token string) (caller, error) {
	if len(token) > mostToken {
		return caller{}, fmt.Errorf("a token of %d bytes", len(token))
	}
	sum := sha256.Sum256([]byte(token))
	if who := d.remembered(sum); who.user != "" {
		return who, nil
	}
	// This needs no question to the API server.
	if err := plausible(token, d.audience); err != nil {
		return caller{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTime)
	defer cancel()
	select {
	case d.asking <- struct{}{}:
		defer func() { <-d.asking }()
	case <-ctx.Done():
		return caller{}, fmt.Errorf("%w: too many callers at once that are not known yet", errdefs.ErrUnavailable)
	}
	review, err := d.api.review(ctx, authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{d.audience}})
	switch {
	case err != nil:
		return caller{}, fmt.Errorf("%w: ask the API server whose a token is: %w", errdefs.ErrUnavailable, err)
	case !review.Authenticated || !slices.Contains(review.Audiences, d.audience):
		return caller{}, fmt.Errorf("the API server does not know the token for the audience %s: %s", d.audience, review.Error)
	}
	who := caller{review.User.Username, strings.Join(review.User.Extra[nodeOfToken], "")}
	d.remember(sum, who)
	return who, nil
}

func (d *door) remembered(sum [sha256.Size]byte) caller {
	d.mu.Lock()
	defer d.mu.Unlock()
	if have := d.known[sum]; time.Now().Before(have.until) {
		return have.caller
	}
	return caller{}
}

func (d *door) remember(sum [sha256.Size]byte, who caller) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.known) >= mostKnown || d.known == nil {
		d.known = map[[sha256.Size]byte]known{} // the API server is asked again
	}
	d.known[sum] = known{who, time.Now().Add(knownFor)}
}
