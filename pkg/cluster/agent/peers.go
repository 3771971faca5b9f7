package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// This file has how an agent reaches the agents of other nodes.

// How long the agent of another node may take for an answer: homeTime for most, openTime for an export, which takes several steps.
const (
	homeTime = 10 * time.Second
	openTime = time.Minute
)

// atNode calls the agent of a node at the endpoint where it was found last. If that does not answer, it reads the endpoint at the API server and calls again
// there. So it works without an API server for an agent that was found before. It may call twice: a copy, which takes
// long, uses agentOf.
func (a *Agent) atNode(ctx context.Context, node string, call func(grpc.ClientConnInterface) error) error {
	at := func(place v1alpha1.AgentEndpoint) error {
		agent, err := a.connection(node, place)
		if err != nil {
			return err
		}
		return call(agent)
	}
	last, known := a.others.last(node)
	var err error
	if known {
		if err = at(last); err == nil || !errors.Is(err, errdefs.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
	}
	now, failure := a.endpoint(ctx, node)
	switch {
	case !known && failure != nil:
		return failure
	case failure != nil || known && now == last:
		return err
	}
	a.others.found(node, now)
	return at(now)
}

// last returns the endpoint where the agent of a node was found last.
func (o *others) last(node string) (at v1alpha1.AgentEndpoint, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	at, known = o.agents[node]
	return at, known
}

// found notes the endpoint where the agent of a node was found.
func (o *others) found(node string, at v1alpha1.AgentEndpoint) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.agents[node] = at
}

// endpoint returns the endpoint of the agent of a node, by the objects of its pools at the API server. ErrUnavailable if they have none.
func (a *Agent) endpoint(ctx context.Context, node string) (v1alpha1.AgentEndpoint, error) {
	var pools v1alpha1.PoolList
	if err := a.kube.Live.List(ctx, &pools, client.MatchingFields{"spec.nodeName": node}); err != nil {
		return v1alpha1.AgentEndpoint{}, kube.APIError("look for the agent of node "+node, err)
	}
	for _, p := range pools.Items {
		if p.Status.Agent != nil {
			return *p.Status.Agent, nil
		}
	}
	return v1alpha1.AgentEndpoint{}, fmt.Errorf("%w: the agent of node %s has no port: start its driver with --agent-endpoint", errdefs.ErrUnavailable, node)
}

// agentOf returns a connection to the agent of another node, for a copy. ErrUnavailable if its endpoint is not known yet.
func (a *Agent) agentOf(ctx context.Context, node string) (grpc.ClientConnInterface, error) {
	at, err := a.endpoint(ctx, node)
	if err != nil {
		return nil, err
	}
	return a.connection(node, at)
}

// connection returns a connection to the agent of a node at an endpoint. ErrUnavailable if this agent calls no other ones.
func (a *Agent) connection(node string, at v1alpha1.AgentEndpoint) (grpc.ClientConnInterface, error) {
	if a.options.Agents == nil {
		return nil, fmt.Errorf("%w: this agent calls no other ones: start the driver of node %s with --agent-endpoint", errdefs.ErrUnavailable, a.local.Node())
	}
	return a.options.Agents.Agent(node, at)
}
